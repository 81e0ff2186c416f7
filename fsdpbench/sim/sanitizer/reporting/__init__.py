"""What the sanitizer reports: findings, places, names of streams, needless synchronisations."""
