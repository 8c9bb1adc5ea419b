"""The protocols that a session speaks. Each turns a request into an `Asked`, and a `Reply` into JSON and events."""
