"""Operations on all executions that match a filter."""
