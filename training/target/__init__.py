"""The target model in trainable form."""
