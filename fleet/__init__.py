"""Endpoints and slots, discovery, scraped load, the books, and what a plugin is."""
