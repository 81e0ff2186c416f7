"""What commands print: tables, progress, notes."""
