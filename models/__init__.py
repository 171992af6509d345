"""Targets and drafts: loading, comparing vocabularies, initialising, exporting."""
