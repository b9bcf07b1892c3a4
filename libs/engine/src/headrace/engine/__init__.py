"""Headrace."""
