//! `storaged cert`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Subcommand;
use storaged_sdk::wire::NodeName;

use super::{CliError, print};
use crate::net::cert::{create_ca, issue, renew, revoke};

const DAY: Duration = Duration::from_secs(86_400);

#[derive(Debug, Subcommand)]
pub enum CertCommand {
    /// Make a certificate authority: DIR/ca.pem and DIR/ca.key
    #[command(
        after_help = "Next: storaged cert issue DIR NODE, for every node. Keep ca.key off the nodes."
    )]
    Ca {
        /// Directory to make it in
        directory: PathBuf,
        /// How long it is valid
        #[arg(long, default_value_t = 3650)]
        days: u32,
    },
    /// Make a node's certificate: DIR/NODE.pem and DIR/NODE.key, signed by the authority in DIR
    #[command(
        after_help = "Next: name ca.pem, NODE.pem and NODE.key in [tls] of the node's configuration."
    )]
    Issue {
        /// Directory of the authority
        directory: PathBuf,
        /// The node's name, as in its configuration
        node: NodeName,
        /// How long it is valid
        #[arg(long, default_value_t = 365)]
        days: u32,
    },
    /// Make a new certificate and key in place of a node's DIR/NODE.pem and DIR/NODE.key
    #[command(
        after_help = "Next: copy both files to the node and reload its daemon: systemctl reload storaged, or kill -HUP. Links and RAM stay."
    )]
    Renew {
        /// Directory of the authority
        directory: PathBuf,
        /// The node's name, as in its configuration
        node: NodeName,
        /// How long it is valid
        #[arg(long, default_value_t = 365)]
        days: u32,
    },
    /// Add a node's certificate to the authority's list of revoked ones: DIR/crl.pem
    #[command(
        after_help = "Next: copy crl.pem to every node, where tls.crl names it: daemons take it within tls.watch (30 s), or at a reload, and end their links to the node. storaged cert renew DIR NODE gives it another certificate, if it is to come back."
    )]
    Revoke {
        /// Directory of the authority
        directory: PathBuf,
        /// The node's name, as in its configuration
        node: NodeName,
        /// The certificate to revoke instead of DIR/NODE.pem
        #[arg(long)]
        certificate: Option<PathBuf>,
    },
}

pub fn cert(command: CertCommand) -> Result<(), CliError> {
    let path = match command {
        CertCommand::Ca { directory, days } => create_ca(&directory, DAY * days)?,
        CertCommand::Issue {
            directory,
            node,
            days,
        } => issue(&directory, &node, DAY * days)?,
        CertCommand::Renew {
            directory,
            node,
            days,
        } => renew(&directory, &node, DAY * days)?,
        CertCommand::Revoke {
            directory,
            node,
            certificate,
        } => revoke(&directory, &node, certificate.as_deref())?,
    };
    print(&path.display().to_string());
    Ok(())
}
