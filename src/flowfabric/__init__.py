"""FlowFabric: durable execution for Python on nothing but Postgres."""
