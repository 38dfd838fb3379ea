"""Pure tensor functions, one idea per file. They know nothing of families, configurations or meshes."""
