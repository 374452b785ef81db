"""Rules about why a precision is not faster, and what makes a comparison unreliable."""
