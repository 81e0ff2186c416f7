"""Running a plan: many configurations, resumable, with progress."""
