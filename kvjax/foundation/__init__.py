"""The lowest package: errors, configs, command lines, tables, paths."""
