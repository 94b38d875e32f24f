"""The commands and the report; no logic of its own. Start with main.py. May import everything."""
