"""The tool-call verifiers: formats that models write, and the rules of RLLA."""
