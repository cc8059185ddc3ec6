"""Workers, lanes and database sessions."""
