"""Execution ids: minting, deriving and parsing them."""

from flowfabric.model.ids import (
    ExecutionId,
    PartitionFamily,
    PartitionKey,
    Partitions,
    deterministic_for_flow,
    deterministic_solo,
    mint_for_flow,
    mint_solo,
    parse_partition_key,
    plain_id,
)

__all__ = [
    "ExecutionId",
    "PartitionFamily",
    "PartitionKey",
    "Partitions",
    "deterministic_for_flow",
    "deterministic_solo",
    "mint_for_flow",
    "mint_solo",
    "parse_partition_key",
    "plain_id",
]
