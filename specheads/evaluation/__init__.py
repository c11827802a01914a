"""Measuring: what speculation brings on real prompts, and the small real model to try it on."""
