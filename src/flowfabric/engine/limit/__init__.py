"""Limits: budgets, quotas, what they are attached to, and the admission of claims."""
