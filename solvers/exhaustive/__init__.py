"""Exhaustive search over what is in memory; the table in README.md says what lives here."""
