"""Services as processes of their own, to be attacked."""
