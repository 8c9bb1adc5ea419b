"""Model families: architectures as Megatron-core modules, and the tables between them and Hugging Face."""
