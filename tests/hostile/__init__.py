"""Attacks from outside: clients, engines, hooks and disks that mean harm, against the services as they are."""
