"""One-line changes that a test has to notice: `make mutants` applies each to a copy of the tree and runs its tests."""
