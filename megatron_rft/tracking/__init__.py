"""What a run tells the outside: numbers in files, a display for people, curves. Knows no algorithms."""
