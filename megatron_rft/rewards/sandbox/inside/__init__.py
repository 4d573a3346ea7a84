"""The scripts that run inside the sandbox. Nothing outside of this folder imports them."""
