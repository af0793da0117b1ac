"""Commands and processes: configuration, plan, roles, supervisor, records."""
