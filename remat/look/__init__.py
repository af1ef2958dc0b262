"""Output for people: the report, its HTML page, tables, pictures and exports."""
