"""The parts of an engine on a CPU that SGLang lacks."""
