"""One typed, frozen tree for a whole run. Imports neither torch nor any service."""
