"""The worlds: suites of tasks, their scores, and gymnasium vector environments that play them."""
