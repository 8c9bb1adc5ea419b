"""SGLang servers seen from outside: their start, their responses, and the watch over them."""
