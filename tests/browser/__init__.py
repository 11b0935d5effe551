"""Views of the pages, in a real Chromium."""
