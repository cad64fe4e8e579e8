"""What every other part may import: errors, configs, command lines, tables, where things lie."""
