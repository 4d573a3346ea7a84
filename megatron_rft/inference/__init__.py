"""Generation engines, how weights reach them, and the proof that they arrived. Import from the modules."""
