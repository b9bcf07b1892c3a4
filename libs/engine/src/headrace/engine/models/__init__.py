"""Model families. Each is a package with its modules, its cache declaration and its tensor names."""
