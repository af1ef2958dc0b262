"""What is told on stderr while work goes on; the table in README.md says what lives here."""
