"""The tables of the suites: levels, random and human scores."""
