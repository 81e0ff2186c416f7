"""From figures to words: verdict, text, comparison of two traces."""
