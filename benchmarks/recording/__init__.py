"""What recording a forward costs, against one forward without memory."""
