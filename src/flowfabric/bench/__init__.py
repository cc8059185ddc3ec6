"""The benchmark: FlowFabric compared with plain Postgres and with other task queues."""
