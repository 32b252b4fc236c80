"""Model parts and marks that torch lacks; all of it runs on one device."""
