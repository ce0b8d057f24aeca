"""One folder per framework, each turning the framework's own training step into a `Timeline`."""
