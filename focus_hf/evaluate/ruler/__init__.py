"""RULER's synthetic tasks: answers that need what was said far back."""
