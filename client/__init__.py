"""What a user touches: SDK, coordinator, Generate server, local engine, command line. Imports without torch."""
