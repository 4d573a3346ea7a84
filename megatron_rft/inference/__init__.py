"""Generation engines, the transport of weights to them, and its verification. Import from the modules."""
