"""What a person sees: the report, its HTML page, pictures and exports."""
