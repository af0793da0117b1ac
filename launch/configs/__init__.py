"""The settings of each built-in suite, as YAML files."""
