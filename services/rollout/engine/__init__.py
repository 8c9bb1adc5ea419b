"""SGLang servers as seen from outside: how they start, what they answer, who watches them."""
