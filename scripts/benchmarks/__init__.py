"""Side-by-side figures: this project against its peers and against what the machine can do. See `scripts/bench --help`."""
