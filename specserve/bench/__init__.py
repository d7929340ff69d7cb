"""Honest numbers: every subcommand measures its systems side by side in one run and can write what it saw as JSON."""
