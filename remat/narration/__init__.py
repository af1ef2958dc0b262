"""The status line on stderr during work that takes over a second; see README.md."""
