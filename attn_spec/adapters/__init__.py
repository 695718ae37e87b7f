"""How a user's object becomes an `Implementation`: resolved by name, its signature read, its conventions measured."""
