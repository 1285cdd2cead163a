"""A page about a run, or several side by side, from what lies in their folders: no network, no script."""
