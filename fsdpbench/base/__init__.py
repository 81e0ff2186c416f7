"""The ground of all rooms: errors, numbers, settings, configurations, reports of scripts, and files read and
written safely."""
