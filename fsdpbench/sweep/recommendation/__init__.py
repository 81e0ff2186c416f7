"""What a sweep recommends: the best configurations, compiled too, as code to paste."""
